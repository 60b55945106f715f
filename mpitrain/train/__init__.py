"""When gradients leave, and the loop around it."""
