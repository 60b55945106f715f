"""Optimizers, gradient clipping and learning-rate schedules over flat parameter buffers."""
