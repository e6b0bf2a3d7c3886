"""The engine that both workers stand on."""

# before anything here imports torch
from outrider.lm import threads as threads
