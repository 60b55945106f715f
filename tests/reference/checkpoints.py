"""What a commit record says of whole tensors that all ranks hold."""

from mpitrain.checkpoint.claims import assign_pieces, claims_of


def record_tensors(tensors, ranks):
    """Return the tensors of a commit record, as if that many ranks held every tensor whole."""
    return assign_pieces([claims_of("tensors", tensors, {})] * ranks)


def owners_of(tensors, ranks):
    """Return the rank that writes each tensor."""
    return {name: record.pieces[0].rank for name, record in record_tensors(tensors, ranks).items()}
