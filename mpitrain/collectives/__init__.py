"""How a sum travels: native MPI, ring, direct, server; one Reducer contract."""
