"""Models that are split over ranks: within layers (tensor), between layers (pipeline), and both."""
