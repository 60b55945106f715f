"""Whether replicas are the same: hashes of parameters."""

import hashlib

from mpitrain.params import Params


def params_sha256(params: Params) -> str:
    """Hash the bits of all tensors in the order of their names; padding does not count."""
    digest = hashlib.sha256()
    for name in sorted(params):
        digest.update(name.encode())
        digest.update(params[name].data)
    return digest.hexdigest()
