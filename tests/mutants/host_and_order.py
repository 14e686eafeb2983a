"""Mutants of rounds, of order between overlapping launches, of drafts that are worse but exact, and of seeds."""

from __future__ import annotations

from tests.mutants.mutant import seen_by, tested_by

ROUNDS = [
    *seen_by(
        "rounds",
        "kdgen/runtime/rounds.py",
        ("rounds of",),
        (
            "a unit recorded for a shorter context",
            'kind = (budget, context, engine.choosing("decode", [0]))',
            'kind = (budget, 0, engine.choosing("decode", [0]))',
        ),
        (
            "the last measured round stays committed",
            "                self.engine.cut(self._length, root)\n                self._costs[budget] = ",
            "                self._costs[budget] = ",
        ),
        ("results of rounds that were cut off wait for the next run", "        self._results.clear()\n", ""),
        (
            "a budget's shape is not applied to verify",
            'engine.choosing("verify", [0]), budget + 1, context, instead=shape)',
            'engine.choosing("verify", [0]), budget + 1, context)',
        ),
        (
            "running rounds commit no root",
            "1 + (self._extent(budget)[0] if budget else 0) for budget in self._running",
            "(self._extent(budget)[0] if budget else 0) for budget in self._running",
        ),
        (
            "a unit sees no keys beyond those of the rounds that run",
            "recorded_context(self._reach() + rows)",
            "recorded_context(self._reach())",
        ),
        ("what the draft expects begins a depth late", "log_probs[0, :depths, :width]", "log_probs[0, 1 : depths + 1, :width]"),
    ),
    *seen_by(
        "rounds",
        "kdgen/runtime/decode.py",
        ("rounds of",),
        ("rounds end with the token before the last", "output.length, output.tokens[-1])", "output.length, output.tokens[-2])"),
    ),
    *seen_by(
        "rounds",
        "kdgen/runtime/request.py",
        ("rounds of",),
        ("a round gives more tokens than are wanted", "stop)[: self.room]", "stop)"),
    ),
    *seen_by(
        "rounds",
        "kdgen/runtime/rounds.py",
        ("rounds of",),
        (
            "measured steps end with token 0",
            "            engine.cut(length, root)\n        costs",
            "            engine.cut(length, 0)\n        costs",
        ),
    ),
    *tested_by(
        "rounds",
        "kdgen/runtime/budget.py",
        "tests/unit/test_budget.py",
        ("a round's outcome is another's", "if not self._looks.popleft():", "if not self._looks.pop():"),
        (
            "a bucket's last node is the next one's",
            "sums[bisect.bisect_left(budgets, taken)]",
            "sums[bisect.bisect_right(budgets, taken) % len(sums)]",
        ),
        (
            "accepted nodes of a look count for no budget",
            "sum(accepted) - sum(believed[:best])",
            "sum(accepted[:best]) - sum(believed[:best])",
        ),
    ),
]

ORDER = [
    *seen_by(
        "order",
        "templates/kernels/moe_sort.cu.j2",
        ("programs",),
        (
            "experts may read before the lists are known to all",
            "  __threadfence();\n  __syncthreads();\n  // not before the lists",
            "  griddepcontrol_launch_dependents();\n  __threadfence();\n  __syncthreads();\n  // not before the lists",
        ),
    ),
    *seen_by(
        "order",
        "templates/kernels/embed.cu.j2",
        ("programs",),
        (
            "the next kernel may read a residual that is not cleared",
            "  __threadfence();\n  __syncthreads();\n  // not before: the next kernel",
            "  griddepcontrol_launch_dependents();\n  __threadfence();\n  __syncthreads();\n  // not before: the next kernel",
        ),
    ),
    *seen_by(
        "order",
        "templates/kernels/linear_mma.cu.j2",
        ("programs",),
        (
            "a sender lets the next kernel go on before it has waited",
            "  SHARED_DYNAMIC(Shared, shared);\n{% if not p.outbox %}\n  griddepcontrol_launch_dependents();\n{% endif %}",
            "  SHARED_DYNAMIC(Shared, shared);\n  griddepcontrol_launch_dependents();",
        ),
    ),
    *seen_by(
        "order",
        "templates/kernels/linear_f32.cu.j2",
        ("ranks by peer, kernels",),
        (
            "a sender lets the next kernel go on before it waits",
            "  griddepcontrol_wait();\n  // not before the wait",
            "  griddepcontrol_launch_dependents();\n  griddepcontrol_wait();\n  // not before the wait",
        ),
    ),
    *seen_by(
        "order",
        "templates/kernels/experts_mma.cu.j2",
        ("programs",),
        (
            "ends without having waited",
            "  griddepcontrol_wait();\n{% endif %}\n}\n",
            "{% endif %}\n}\n",
        ),
    ),
    *seen_by(
        "order",
        "templates/kernels/rmsnorm.cu.j2",
        ("programs",),
        (
            "the number of rows is read too early",
            "{% else %}\n  griddepcontrol_wait();\n  const int tokens = *num_tokens;",
            "{% else %}\n  const int tokens = *num_tokens;\n  griddepcontrol_wait();",
        ),
    ),
    *seen_by(
        "order",
        "templates/kernels/norm_and_cache.cu.j2",
        ("programs",),
        (
            "the cache's blocks do not wait",
            "  griddepcontrol_wait();\n  if (!is_there) return;",
            "  if (blockIdx.y == 0) griddepcontrol_wait();\n  if (!is_there) return;",
        ),
    ),
    *seen_by(
        "order",
        "templates/kernels/mla_combine_rows.cu.j2",
        ("programs",),
        (
            "values are read before it has waited",
            "  griddepcontrol_wait();\n  if (splits == 0) return;\n  uint4 part[BATCH];",
            "  if (splits == 0) return;\n  if (threadIdx.x < 32) griddepcontrol_wait();\n  uint4 part[BATCH];",
        ),
    ),
    *seen_by(
        "order",
        "kdgen/plan/ops/attention_schedule.py",
        ("programs",),
        ("schedules of later groups begin at the step's first row", 'number("first_row", group.first)', 'number("first_row", 0)'),
    ),
    *seen_by(
        "order",
        "kdgen/plan/ops/attention_combine.py",
        ("programs",),
        (
            "splits of later groups are joined for the first rows",
            'reads("int", "row_position", group.at("row_position")), values',
            'reads("int", "row_position"), values',
        ),
    ),
    *seen_by(
        "order",
        "kdgen/plan/ops/attention.py",
        ("programs",),
        ("paths of later groups are the first rows'", 'group.at("row_path", 4 * MAX_PATH)', 'group.at("row_path")'),
    ),
    *seen_by(
        "order",
        "kdgen/plan/ops/norm.py",
        ("programs",),
        ("the last norm takes rows by the positions of their tokens", 'buffer("logit_row")', 'buffer("logit_position")'),
    ),
    *seen_by(
        "order",
        "kdgen/plan/ops/logits.py",
        ("programs",),
        (
            "sequences and positions of the logits' rows are exchanged",
            '"row_sequence": "logit_sequence", "row_position": "logit_position"',
            '"row_sequence": "logit_position", "row_position": "logit_sequence"',
        ),
    ),
]

WORSE = [
    *seen_by(
        "worse",
        "kdgen/runtime/request.py",
        ("tiny f32, requests together", "tiny f32, decodes", "rounds of"),
        ("a drafter is shown no prompt", "propose([*self.request.prompt, *self.tokens], depths)", "propose(self.tokens, depths)"),
        ("a stop is noticed a token late", "self._stopped or", "self.tokens[-2:-1] and self.tokens[-2] in self.request.stop or"),
    ),
    *seen_by(
        "worse",
        "kdgen/runtime/batch.py",
        ("tiny f32, requests together", "tiny f32, decodes", "rounds of"),
        ("a prompt goes token by token", "min(running.request.chunk or room, room)", "min(running.request.chunk or 1, room)"),
    ),
    *seen_by(
        "worse",
        "kdgen/drafters/ngram.py",
        ("rounds of every kind",),
        (
            "the shortest suffix first",
            "range(min(self.longest, len(tokens) - 1), 0, -1)",
            "range(1, min(self.longest, len(tokens) - 1) + 1)",
        ),
        ("the oldest occurrence has most to say", "+= 1 / (1 + age)", "+= 1 / (len(starts) - age)"),
    ),
    *seen_by(
        "worse",
        "kdgen/drafters/base.py",
        ("rounds of every kind",),
        ("candidates by id", "key=lambda pair: (-pair[1], pair[0])", "key=lambda pair: pair[0]"),
    ),
    *seen_by(
        "worse",
        "kdgen/runtime/engine.py",
        ("tiny f32, requests together", "tiny f32, decodes", "rounds of"),
        ("a block's candidates are those of the root's row", "first = int(begins[place]) + 1  #", "first = int(begins[place])  #"),
        (
            "a batch's drafts overwrite each other's logits",
            "logits, first * self.spec.vocab_size)",
            "logits, place * self.spec.vocab_size)",
        ),
        ("rounds have a block without its last row", "np.array([0, block_rows], np.int32)", "np.array([0, block_rows - 1], np.int32)"),
    ),
]

SEEDS = [
    *seen_by(
        "seeds",
        "kdgen/spec/sampling.py",
        ("tiny f32, requests together", "2 ranks"),
        ("a seed of 64 bits is refused", "0 <= self.seed < 2**64", "0 <= self.seed < 2**63"),
    ),
    *seen_by(
        "seeds",
        "kdgen/runtime/engine.py",
        ("tiny f32, requests together", "2 ranks"),
        ("seeds are signed", "np.array([s.seed for s in chosen], np.uint64)", "np.array([s.seed for s in chosen]).astype(np.int64)"),
        (
            "seeds lose their last bits in a float",
            'self._write("seed", np.array([s.seed for s in chosen], np.uint64)',
            'self._write("seed", np.array([float(s.seed) for s in chosen]).astype(np.uint64)',
        ),
        (
            "a step draws only when all of its sequences do",
            "any(self._sampling[each].temperature for each in sequences)",
            "all(self._sampling[each].temperature for each in sequences)",
        ),
        (
            "a step draws only when its first sequence does",
            "program = self.choosing(program, sequences)",
            "program = self.choosing(program, sequences[:1])",
        ),
    ),
    *seen_by(
        "seeds",
        "templates/kernels/sample.cu.j2",
        ("tiny f32, requests together",),
        ("the low word's sign goes into the high one", "<< 32 | (u32)seed[2 * sequence];", "<< 32 | seed[2 * sequence];"),
        ("the key's high word begins a bit early", "(u32)(seed >> 32)}", "(u32)(seed >> 31)}"),
        ("the last token of the nucleus is out", "token_key < lowest_key ||", "token_key <= lowest_key ||"),
    ),
    *seen_by(
        "seeds",
        "kdgen/plan/ops/logits.py",
        ("tiny f32, requests together", "2 ranks"),
        (
            "top-p and min-p exchanged",
            '*reads_floats("top_p min_p"),',
            'reads("float", "top_p", buffer("min_p")), reads("float", "min_p", buffer("top_p")),',
        ),
    ),
]
