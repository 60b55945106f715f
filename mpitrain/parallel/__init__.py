"""Model parallelism: layers split over the tensor axis, the chain of layers cut over the pipeline axis."""
