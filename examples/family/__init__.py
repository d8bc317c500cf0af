"""A small real model family: its text, its tokenizer, its network and its training.

`text` finds text, `tokenizer` turns it into tokens, `model` turns tokens into predictions,
`training` fits and measures a model, and `checkpoint` reads and writes models as Hugging Face
directories. The scripts beside this package join them.
"""

import os

# Threads of torch that wait for one another spin by default, and lose most of their time to that
# wherever something else runs too. It is read when torch is loaded, so the scripts import torch
# through this package alone.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
