"""Which of several continuations does a model find most likely?"""

from importlib.resources import files
from pathlib import Path

import numpy as np

import bminf_lite

PROMPT = "The file is"
CONTINUATIONS = [" closed", " opened", " a banana"]

with bminf_lite.load(Path(str(files("bminf_lite"))) / "demo_model") as model:
    start = model.tokenizer.encode(PROMPT)
    for continuation in CONTINUATIONS:
        ids = start + model.tokenizer.encode(continuation, add_special_tokens=False)
        logits = model.logits(ids)[len(start) - 1 : -1].astype(np.float64)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        total = log_p[np.arange(len(log_p)), ids[len(start) :]].sum()
        print(f"{total:8.2f} nats  {PROMPT}{continuation}")
