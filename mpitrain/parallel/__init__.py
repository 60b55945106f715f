"""How a model is split over ranks: within layers (tensor), between layers (pipeline), and where to cut."""
