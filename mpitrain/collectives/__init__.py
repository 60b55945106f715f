"""How a sum travels: native MPI, ring, direct; one Reducer contract."""
