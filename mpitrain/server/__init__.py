"""Parameter servers: who may go on, in which order pushes are applied, and what that gives (pure parts first)."""
