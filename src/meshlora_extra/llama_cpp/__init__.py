"""GGUF files, which llama.cpp and Ollama read: of an adapter (`adapter`), and of a whole model (`model`)."""
