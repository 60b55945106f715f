"""What bytes travel: one file a codec, the registry, the memories."""
