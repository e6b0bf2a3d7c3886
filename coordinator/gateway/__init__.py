"""OpenAI's HTTP API over `Generate`: a process of its own, and a client of the coordinators like any other."""
