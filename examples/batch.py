"""Several requests in one engine. Each gets the tokens, and the bits, that it would get alone."""

from kdgen.backends import open_backend
from kdgen.drafters.ngram import NgramDrafter
from kdgen.files.resources import demo_dir
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Limits
from kdgen.runtime.batch import decode_together
from kdgen.runtime.model import open_model
from kdgen.runtime.pipeline import start_engine
from kdgen.runtime.request import Request
from kdgen.spec.sampling import Sampling
from kdgen.text.tokenizer import decode, load_tokenizer

model = open_model(demo_dir() / "model-int4")
tokenizer = load_tokenizer(model.text)
plan = build_plan(model.spec, limits=Limits(max_context=128, max_sequences=2))  # the third request waits until a sequence is free
engine = start_engine(model.spec, plan, open_backend(), model.weights)

first, second = (tokenizer.encode(text, begin=True) for text in ("def factorial(n):\n    if n", "for i in range("))
requests = [
    Request(first, max_new_tokens=16),
    Request(second, max_new_tokens=16, drafter=NgramDrafter()),
    Request(second, max_new_tokens=16, sampling=Sampling(temperature=0.8, seed=7)),
]
for finished in decode_together(engine, requests):
    print(f"request {finished.number}, {finished.forwards} forwards: {decode(tokenizer, finished.tokens)!r}")
