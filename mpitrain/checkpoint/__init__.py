"""Checkpoints: rank-local HDF5 shards, an index that shows whole tensors, and a commit record."""
