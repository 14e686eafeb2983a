"""A drafter of your own. The model accepts or rejects what it proposes, so a bad drafter costs time and changes no token."""

from collections.abc import Sequence

from kdgen.drafters.base import Candidates, from_lists
from kdgen.files.resources import demo_dir
from kdgen.runtime.decode import decode_plain, decode_tree
from kdgen.runtime.model import open_model
from kdgen.runtime.pipeline import open_engine
from kdgen.runtime.request import Request
from kdgen.text.tokenizer import load_tokenizer

SPACE = 32  # the demo model's tokens are bytes


class SpacesDrafter:
    """Guesses a space at every depth, as in indentation."""

    name = "spaces"

    def propose(self, context: Sequence[int], depths: int) -> Candidates:
        return from_lists([[(SPACE, 0.9)]] * depths)


model = open_model(demo_dir() / "model-int4")
prompt = load_tokenizer(model.text).encode("def factorial(n):\n    if n", begin=True)
engine = open_engine(model, context=256).engine
drafted = decode_tree(engine, Request(prompt, 40, drafter=SpacesDrafter(), budget=4, block_size=5))
plain = decode_plain(engine, Request(prompt, 40))
print(f"{drafted.target_forwards} forwards instead of {plain.target_forwards}; same tokens: {drafted.tokens == plain.tokens}")
