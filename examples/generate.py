"""Continue a prompt with the model that is shipped with kdgen: from a folder to text."""

from kdgen.files.resources import demo_dir
from kdgen.runtime.decode import decode_plain
from kdgen.runtime.model import open_model
from kdgen.runtime.pipeline import open_engine
from kdgen.runtime.request import Request
from kdgen.text.tokenizer import decode, load_tokenizer

model = open_model(demo_dir() / "model-int4")  # any published folder, or a .kdtr file
tokenizer = load_tokenizer(model.text)
engine = open_engine(model, context=256).engine  # plans, compiles and loads; without a GPU, on the CPU
tokens = decode_plain(engine, Request(tokenizer.encode("def factorial(n):\n    if n", begin=True), 50)).tokens
print(decode(tokenizer, tokens))
