"""How the processes of a run start and are supervised. Nothing here imports torch."""
