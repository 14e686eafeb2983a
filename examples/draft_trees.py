"""Decode with draft trees, then plainly, and compare tokens and the bits of every cache row."""

from kdgen.drafters.dflash import DFlashDrafter
from kdgen.files.resources import demo_dir
from kdgen.runtime.decode import Decoder, same_rows
from kdgen.runtime.model import open_model, with_drafter
from kdgen.runtime.pipeline import open_engine
from kdgen.runtime.request import Request
from kdgen.text.tokenizer import load_tokenizer

model = with_drafter(open_model(demo_dir() / "model-int4"), demo_dir() / "drafter")
prompt = load_tokenizer(model.text).encode("def factorial(n):\n    if n", begin=True)
engine = open_engine(model, context=256).engine
decoder = Decoder(engine)  # decodes in rounds that run entirely on the device, because the drafter does

trees = decoder.decode(Request(prompt, 40, drafter=DFlashDrafter(block_size=16), budget=15, block_size=16))
rows_of_trees = engine.cache_rows()
plain = decoder.decode(Request(prompt, 40))

print(f"draft trees: {trees.target_forwards} forwards, {trees.tokens_per_forward:.2f} tokens each")
print(f"plain: {plain.target_forwards} forwards")
print(f"same tokens: {trees.tokens == plain.tokens}; same bits: {same_rows(engine.cache_rows(), rows_of_trees)}")
