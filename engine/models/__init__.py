"""The networks and their tokenizer: llama.py, tokenizer.py. Pure torch, no scheduling."""
