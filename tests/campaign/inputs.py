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

from kdgen.model import described
from tests.campaign import judge
from tests.campaign.damage import Damage, apply, nothing, of_bytes, of_header, of_json, of_template, of_values
from tests.campaign.process import Outcome, environment, run_forked
from tests.campaign.subjects import ON_CPU, PROMPT, Subject, Subjects, clone, generate

BATCH = 100  #: inputs that one call of Hypothesis draws


@dataclass(frozen=True)
class Case:
    """One input: a subject, which file of it is damaged and how, and the command that reads it."""

    subject: Subject
    file: str
    damage: Damage
    command: str

    def __str__(self) -> str:
        return f"{self.command} of {self.subject.name}/{self.file}, {self.damage.title}"


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
    kinds: Counter[str] = field(default_factory=Counter)

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
        found += [of_json(data)] * 4
    if file.endswith((".safetensors", ".kdtr")):
        found += [of_header(data), of_header(data), of_values(data), of_values(data)]
    if file == "tokenizer_config.json":
        found += [of_template()] * 3
    return st.one_of(st.just(nothing()), *found) if file == "config.json" else st.one_of(*found)


def _commands(subject: Subject, file: str) -> tuple[str, ...]:
    if file.endswith(".kdtr"):
        return ("generate", "inspect", "inspect --verify")
    if subject.name == "spec":
        return ("plan",)
    if subject.name == "drafter":
        return ("draft",)
    if file == "config.json":
        return ("spec", "spec", "spec", "import", "quantize")
    if file.endswith(".safetensors"):
        return ("import", "generate", "generate", "inspect", "quantize")
    if file.endswith("index.json"):
        return ("import", "generate", "spec")
    return ("text", "chat")


def cases(subjects: Subjects) -> st.SearchStrategy[Case]:
    """Any subject, any of its files, damage that suits it, a command that reads it."""
    found = []
    for subject in (*subjects.models, subjects.packed, subjects.drafter, subjects.spec):
        for file in subject.files:
            damages, commands = _damages(subject, file), st.sampled_from(_commands(subject, file))
            found.append(st.builds(Case, st.just(subject), st.just(file), damages, commands))
    return st.one_of(*found)


def _arguments(case: Case, path: Path, subjects: Subjects, out: Path) -> tuple[list[str], frozenset[str]]:
    """The command line, and the names of what it writes."""
    match case.command:
        case "generate":
            return generate(path), frozenset()
        case "draft":
            return [*generate(subjects.demo.path), "--draft", str(path)], frozenset()
        case "text":
            return ["generate", "--model", str(path), "--prompt", PROMPT, "--max-new-tokens", "2", *ON_CPU], frozenset()
        case "chat":
            return ["generate", "--model", str(path), "--prompt", PROMPT, "--chat", "--max-new-tokens", "2", *ON_CPU], frozenset()
        case "import":
            return ["import", str(path), str(out / "OUT.kdtr")], frozenset({"out/OUT.kdtr"})
        case "quantize":
            written = {f"out/OUT/{name}" for name in (*case.subject.files, "model.safetensors", "model.safetensors.index.json")}
            return ["quantize", str(path), str(out / "OUT")], frozenset({"out/OUT", *written})
        case "plan":
            return ["plan", str(path), "--gpu", "h200"], frozenset()
        case _:
            return [*case.command.split(), str(path)], frozenset()


def _wrong_answer(case: Case, path: Path, outcome: Outcome) -> str:
    """What is wrong with an answer that was given."""
    if case.command == "generate" and path.is_dir():
        return judge.wrong_tokens(outcome, described(path), judge.tensors_of(path))
    if case.command == "spec":
        config = path / "config.json"
        return judge.unlike_config(yaml.safe_load(outcome.stdout), json.loads(config.read_bytes()))
    return ""


def try_case(case: Case, subjects: Subjects, expected: dict[str, str], keep: Path | None = None) -> tuple[Outcome, list[str]]:
    """Damage a copy, run the command, judge how it ended. ``expected`` has the answers of undamaged packed files by name."""
    with tempfile.TemporaryDirectory(prefix="kdgen-campaign-") as name:
        folder = Path(name)
        path = clone(case.subject, folder)
        apply(path if path.is_dir() else folder, case.file, case.damage)
        out = folder / "out"
        out.mkdir()
        arguments, wrote = _arguments(case, path, subjects, out)
        before = judge.files_below(folder)
        outcome = run_forked(arguments, folder, environment(subjects.cache, TMPDIR=str(out)))
        after = judge.files_below(folder)
        named = (case.file, path.name)
        found = judge.problems(outcome, named, before, after, wrote)
        if not found and outcome.code == 0:
            wrong = _wrong_answer(case, path, outcome)
            if not path.is_dir() and case.command == "generate" and _tokens(outcome) != expected[case.subject.name]:
                wrong = f"tokens {_tokens(outcome)} instead of {expected[case.subject.name]}"
            found += [wrong] if wrong else []
        if found and keep is not None:
            shutil.copytree(folder, keep, dirs_exist_ok=True)
        return outcome, found


def _tokens(outcome: Outcome) -> str:
    return str(json.loads(outcome.stdout)["tokens"])


def campaign(subjects: Subjects, base_seed: int, keep: Path, go_on: Callable[[Tally], bool], say: Callable[[str], None]) -> Tally:
    """Draw inputs and try them until ``go_on`` says no. Inputs with findings are kept below ``keep``."""
    tally = Tally()
    answer = run_forked(generate(subjects.packed.path), keep, environment(subjects.cache))
    expected = {subjects.packed.name: _tokens(answer)}
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
            tally.kinds[f"{case.command}, {'.' + case.file.rpartition('.')[2]}"] += 1
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
