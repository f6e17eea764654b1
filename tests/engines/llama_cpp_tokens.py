"""In llama.cpp's own environment: greedy tokens of prompts (stdin, JSON) with a GGUF model, and an adapter if given."""

import json
import sys

from llama_cpp import Llama

model, adapter, number = sys.argv[1:4]
F32 = 0  # ggml's number of the type: the cache is float16 by default
llama = Llama(model, lora_path=adapter or None, n_ctx=256, type_k=F32, type_v=F32, n_threads=1, verbose=False)
found = []
for prompt in json.load(sys.stdin):
    tokens = llama.tokenize(prompt.encode(), add_bos=True, special=True)
    llama.reset()
    said = []
    for token in llama.generate(tokens, temp=0.0, repeat_penalty=1.0, reset=True):
        if token == llama.token_eos() or len(said) == int(number):
            break
        said.append(token)
    found.append({"prompt": tokens, "ids": said})
print(json.dumps(found))
