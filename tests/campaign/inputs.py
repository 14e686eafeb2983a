"""Commands over damaged inputs: each ends in the right answer, or in exit code 2 with a message that names the file."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from kdgen.runtime.model import described
from kdgen.spec.model import Spec
from kdgen.verify.published import raw
from tests.campaign import judge
from tests.campaign.damage import (
    YAML,
    Damage,
    apply,
    nothing,
    of_bytes,
    of_header,
    of_lines,
    of_sealed,
    of_structure,
    of_template,
    of_values,
    split_safetensors,
)  # fmt: skip
from tests.campaign.process import Outcome, environment, run_forked
from tests.campaign.subjects import Subject, Subjects, clone, generate, generate_text

BATCH = 100  #: inputs that one call of Hypothesis draws


@dataclass(frozen=True)
class Case:
    """One input: a subject, one or two damages of its files, and the command that reads them."""

    subject: Subject
    damages: tuple[tuple[str, Damage], ...]
    command: str

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(file for file, _ in self.damages)

    @property
    def key(self) -> str:
        """The key that a refusal must name: that of the one file in which a person wrote it, where nothing else is damaged."""
        (file, damage), *more = self.damages
        by_hand = (file, self.command) in (("config.json", "spec"), ("tiny.yaml", "plan"))
        return damage.key if by_hand and not more else ""

    def __str__(self) -> str:
        return f"{self.command} of {self.subject.name}: " + " and ".join(f"{file}, {damage.title}" for file, damage in self.damages)


@dataclass(frozen=True)
class Finding:
    """An ending that is not acceptable. ``kept`` is the folder of the input, where it was kept."""

    case: str
    problem: str
    kept: str = ""


@dataclass
class Tally:
    """What the inputs came to."""

    refused: int = 0
    answered: int = 0
    findings: list[Finding] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)  #: inputs by the file that was damaged first

    @property
    def inputs(self) -> int:
        return self.refused + self.answered

    def __str__(self) -> str:
        return f"{self.inputs}, {self.answered} answered, {self.refused} refused, {len(self.findings)} findings"


def _damages(subject: Subject, file: str) -> st.SearchStrategy[Damage]:
    """Damage that suits a file: of its bytes, and of its JSON, YAML or safetensors structure."""
    data = (subject.path / file if subject.path.is_dir() else subject.path).read_bytes()
    found = [of_bytes()]
    if file.endswith(".json"):
        found += [of_structure(data)] * 4
    if file.endswith(".yaml"):
        found += [of_structure(data, YAML)] * 4 + [of_lines()]
    if file.endswith(".model"):
        found += [of_lines()] * 3
    if file.endswith(".kdtr"):
        found += [of_sealed(data)] * 3
    if file.endswith((".safetensors", ".kdtr")):
        found += [of_header(data), of_header(data), of_values(data), of_values(data)]
    if file == "tokenizer_config.json":
        found += [of_template()] * 3
    return st.one_of(st.just(nothing()), *found) if file == "config.json" else st.one_of(*found)


def _commands(subject: Subject, file: str) -> tuple[str, ...]:
    if file.endswith(".kdtr"):
        return ("generate", "text", "inspect", "inspect --verify")
    if subject.name == "spec":  # which `kdgen spec` refuses, whatever is in it
        return ("plan",)
    if subject.name == "drafter":
        return ("draft",)
    if file == "config.json":
        return ("spec", "spec", "spec", "import", "quantize")
    if file.endswith(".safetensors"):
        return ("import", "generate", "generate in f32", "inspect", "quantize")
    if file.endswith("index.json"):
        return ("import", "generate", "spec")
    if file == "generation_config.json":
        return ("text", "generate")
    return ("text", "chat")


@st.composite
def _case(draw: st.DrawFn, subject: Subject, damages: dict[str, st.SearchStrategy[Damage]], first: str) -> Case:
    files = [first]
    if draw(st.sampled_from((False, False, True))):
        files.append(draw(st.sampled_from(subject.files)))
    drawn = tuple((file, draw(damages[file])) for file in files)
    return Case(subject, drawn, draw(st.sampled_from(_commands(subject, first))))


def cases(subjects: Subjects) -> st.SearchStrategy[Case]:
    """Any subject, any of its files, damage that suits it, a command that reads it; one time in three a second damage, of any file."""
    found = []
    for subject in subjects.all:
        damages = {file: _damages(subject, file) for file in subject.files}
        found += [_case(subject, damages, file) for file in subject.files]
    return st.one_of(*found)


def _arguments(case: Case, path: Path, subjects: Subjects, out: Path) -> tuple[list[str], frozenset[str]]:
    """The command line, and the names of what it writes."""
    match case.command:
        case "generate":
            return generate(path), frozenset()
        case "generate in f32":
            return [*generate(path), "--dtype", "f32"], frozenset()
        case "draft":
            return [*generate(subjects.demo), "--draft", str(path)], frozenset()
        case "text":
            return generate_text(path), frozenset()
        case "chat":
            return [*generate_text(path), "--chat"], frozenset()
        case "import":
            return ["import", str(path), str(out / "OUT.kdtr")], frozenset({"out/OUT.kdtr"})
        case "quantize":
            written = {f"out/OUT/{name}" for name in (*case.subject.files, "model.safetensors", "model.safetensors.index.json")}
            return ["quantize", str(path), str(out / "OUT")], frozenset({"out/OUT", *written})
        case "plan":
            return ["plan", str(path), "--gpu", "h200"], frozenset()
        case _:
            return [*case.command.split(), str(path)], frozenset()


@dataclass(frozen=True)
class Expected:
    """What undamaged subjects say: tokens and printed specs, by the subject's name."""

    tokens: dict[str, str]
    specs: dict[str, str]


def _wrong_answer(case: Case, path: Path, outcome: Outcome, subjects: Subjects, expected: Expected) -> str:
    """What is wrong with an answer that was given: all of them are held against what the damaged files say, or against the undamaged."""
    out = path.parent / "out"
    match case.command:
        case "generate" | "generate in f32" if path.is_dir():
            return judge.wrong_tokens(outcome, judge.config_of(path), judge.tensors_of(path), judge.ends_of(path))
        case "generate":
            return _wrong_packed(path, outcome, subjects, expected)
        case "draft":  # which changes no token, whatever it proposes
            tokens = _tokens(outcome)
            return "" if tokens == expected.tokens["demo"] else f"tokens {tokens} with this drafter, {expected.tokens['demo']} without"
        case "text" | "chat" if path.is_dir():
            return judge.wrong_text(outcome, path, case.command == "chat")
        case "import":
            again = run_forked(generate(out / "OUT.kdtr"), path.parent, environment(subjects.cache, TMPDIR=str(out)))
            if again.code == 0:
                return judge.wrong_tokens(again, judge.config_of(path), judge.tensors_of(path), judge.ends_of(path))
            too_large = again.code == 2 and "hold a NaN or an infinity" in again.stderr  # finite weights whose logits are not
            return "" if too_large else f"the import is refused: {again.stderr[:200]!r}"
        case "quantize":
            return judge.unlike_source(judge.tensors_of(path), judge.tensors_of(out / "OUT"))
        case "inspect --verify":
            return judge.unlike_written(subjects.packed.path.read_bytes(), path.read_bytes(), case.damages)
        case "spec":
            return _wrong_spec(path, outcome, case, subjects, expected)
        case _:
            return ""


def _wrong_packed(path: Path, outcome: Outcome, subjects: Subjects, expected: Expected) -> str:
    """A packed file may say another spec than the one it was made of; its weights are those of the model it was made of."""
    header, _ = split_safetensors(path.read_bytes())
    made_of = subjects.models[0].path
    spec = Spec.from_mapping(json.loads(header["__metadata__"]["spec"]), "packed")
    if spec == described(made_of):
        return "" if _tokens(outcome) == expected.tokens["packed"] else f"tokens {_tokens(outcome)} instead of {expected.tokens['packed']}"
    return judge.wrong_tokens(outcome, raw(spec), judge.tensors_of(made_of), judge.ends_in(spec, header["__metadata__"]["text"]))


def _wrong_spec(path: Path, outcome: Outcome, case: Case, subjects: Subjects, expected: Expected) -> str:
    """What is printed is what the file says; where that is the undamaged model, it answers, too."""
    printed = yaml.safe_load(outcome.stdout)
    if wrong := judge.unlike_config(printed, json.loads((path / "config.json").read_bytes())):
        return wrong
    if outcome.stdout != expected.specs[case.subject.name] or len(case.damages) > 1:
        return ""
    again = run_forked(generate(path), path.parent, environment(subjects.cache, TMPDIR=str(path.parent / "out")))
    if again.code != 0:
        return f"its spec is the undamaged one, and generate says {again.stderr[:200]!r}"
    return judge.wrong_tokens(again, judge.config_of(path), judge.tensors_of(path), judge.ends_of(path))


def try_case(case: Case, subjects: Subjects, expected: Expected, keep: Path | None = None) -> tuple[Outcome, list[str]]:
    """Damage a copy, run the command, judge how it ended. Where that is not acceptable, the input goes to ``keep``."""
    with tempfile.TemporaryDirectory(prefix="kdgen-campaign-") as name:
        folder = Path(name)
        path = clone(case.subject, folder)
        for file, damage in case.damages:
            apply(path if path.is_dir() else folder, file, damage)
        out = folder / "out"
        out.mkdir()
        arguments, wrote = _arguments(case, path, subjects, out)
        before = judge.files_below(folder)
        outcome = run_forked(arguments, folder, environment(subjects.cache, TMPDIR=str(out)))
        after = judge.files_below(folder)
        found = judge.problems(outcome, (*case.files, path.name), case.key, before, after, wrote)
        if not found and outcome.code == 0:
            try:
                wrong = _wrong_answer(case, path, outcome, subjects, expected)
            except Exception as error:  # a person looks at what kdgen can read and the judge cannot
                wrong = f"kdgen gave an answer, and the judge cannot read the files: {error!r}"
            found += [wrong] if wrong else []
        if found and keep is not None:
            shutil.copytree(folder, keep, dirs_exist_ok=True)
        return outcome, found


def _tokens(outcome: Outcome) -> str:
    return str(json.loads(outcome.stdout)["tokens"])


def undamaged(subjects: Subjects, folder: Path) -> Expected:
    """Run everything once over files without damage."""

    def answer(arguments: list[str]) -> Outcome:
        return run_forked(arguments, folder, environment(subjects.cache))

    tokens = {subject.name: _tokens(answer(generate(subject.path))) for subject in (*subjects.models, subjects.packed)}
    return Expected(tokens, {subject.name: answer(["spec", str(subject.path)]).stdout for subject in subjects.models})


def campaign(subjects: Subjects, base_seed: int, keep: Path, go_on: Callable[[Tally], bool], say: Callable[[str], None]) -> Tally:
    """Draw inputs and try them until ``go_on`` says no. Inputs with findings are kept below ``keep``."""
    tally = Tally()
    expected = undamaged(subjects, keep)
    drawn = cases(subjects)
    for batch in _counting(base_seed):
        if not go_on(tally):
            return tally

        @seed(batch)
        @settings(max_examples=BATCH, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
        @given(drawn)
        def attempt(case: Case) -> None:
            if not go_on(tally):
                return
            folder = keep / f"input-{len(tally.findings)}"
            outcome, found = try_case(case, subjects, expected, folder)
            if outcome.code == 0:
                tally.answered += 1
            else:
                tally.refused += 1
            tally.kinds[f"{case.subject.name}/{case.files[0]}"] += 1
            for problem in found:
                tally.findings.append(Finding(str(case), problem, str(folder)))
                say(f"{case}: {problem}")

        attempt()
        say(f"inputs: {tally}")
    return tally


def _counting(start: int) -> Iterator[int]:
    while True:
        yield start
        start += 1
