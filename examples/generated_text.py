"""From a spec to CUDA text. Nothing is compiled, so neither a GPU nor a compiler is needed."""

from kdgen.codegen.render import render
from kdgen.plan.build import build_plan
from kdgen.spec.model import load_spec

plan = build_plan(load_spec("k26"))  # a shipped spec's name, or a YAML file
texts = {rendered.kernel.name: rendered.text for rendered in render(plan)}
print(f"{len(texts)} kernels for {plan.spec_name}; weights {sum(weight.total_bytes for weight in plan.weights) / 2**30:.1f} GiB")
print(texts["moe_combine"])
