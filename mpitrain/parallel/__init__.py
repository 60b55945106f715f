"""One model on several ranks: tensor parallelism inside its layers, a pipeline between them."""
