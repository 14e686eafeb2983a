"""The instructions that each primitive must be, with all qualifiers and the order of operands, written down from the PTX ISA.

Comments name its sections. What ``Probe`` says of the notation holds here.
"""

from __future__ import annotations

from kdgen.verify.ptx.memory import SHARED_WINDOW
from kdgen.verify.ptx.probes import Probe

_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
_FRAGMENTS = "u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float d0, float d1, float d2, float d3"
_LOADED = "const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};"
_STORED = "for (int i = 0; i < 4; ++i) out[i] = __float_as_uint(d[i]);"
#: What createpolicy.fractional.L2::evict_first.b64 of all accesses gives, CUTLASS's TMA::CacheHintSm90::EVICT_FIRST.
_EVICT_FIRST = "0x12f0000000000000"
#: Whose assembly the compiler must neither drop nor join with another (volatile), and move no access to memory across ("memory").
ORDERED = frozenset({
    "ldmatrix_x4", "ldmatrix_x2", "ldmatrix_x2_trans", "ldmatrix_x4_trans", "warpgroup_fence_operand", "wgmma_fence", "wgmma_commit_group",
    "wgmma_wait_group", "fence_proxy_async", "mbarrier_init", "mbarrier_arrive", "mbarrier_wait_parity", "mbarrier_arrive_expect_tx",
    "barrier_sync", "cp_async_16", "cp_async_commit_group", "cp_async_wait_group", "cp_async_bulk", "ld_relaxed_16", "ld_relaxed_4",
    "griddepcontrol_launch_dependents", "griddepcontrol_wait", "cluster_begin", "send_each_to_cluster", "wait_for_cluster", "send_word",
    "word_is_there",
})  # fmt: skip
#: Those of which only one overload has assembly of its own.
ORDERED_ONCE = frozenset({"keep_until_here", "send_to_cluster", "send_words", "words_are_there"})
#: Whose assembly stays, and stays in order with the other kind, but lets accesses to memory pass.
KEPT = frozenset({
    "uniform_fragment", "wgmma", "setmaxnreg_dec", "setmaxnreg_inc", "evict_first_policy", "ld_global_if", "ld_global_16", "ld_global_8",
    "ld_global_4",
})  # fmt: skip


def probes() -> tuple[Probe, ...]:
    """For sm_90a."""
    return (*_matrices(), *_wgmma(), *_barriers(), *_copies(), *_loads(), *_launches(), *clusters(), *_ranks())


def _matrices() -> tuple[Probe, ...]:
    # mma: "mma.sync.aligned.m16n8k16.alayout.blayout.dtype.bf16.bf16.ctype d, a, b, c"
    found = [
        Probe(
            ("mma_m16n8k16_bf16(float(&)[4], const u32(&)[4], const u32(&)[2])",), _FRAGMENTS,
            f"{_LOADED} float d[4] = {{d0, d1, d2, d3}}; mma_m16n8k16_bf16(d, a, b); {_STORED}",
            (f"{_MMA} {{r0,r1,r2,r3}}, {{a0,a1,a2,a3}}, {{b0,b1}}, {{d0,d1,d2,d3}}",), ("r0", "r1", "r2", "r3"),
        ),
        Probe(
            ("mma_m16n8k16_bf16_from_zero(float(&)[4], const u32(&)[4], const u32(&)[2])",), _FRAGMENTS,
            f"{_LOADED} float d[4] = {{d0, d1, d2, d3}}; mma_m16n8k16_bf16_from_zero(d, a, b); {_STORED}",
            (f"{_MMA} {{r0,r1,r2,r3}}, {{a0,a1,a2,a3}}, {{b0,b1}}, {{0,0,0,0}}",), ("r0", "r1", "r2", "r3"),
        ),
        Probe(
            ("shared_address(const void*)",), "", "out[0] = shared_address(s + 16); out[1] = reinterpret_cast<size_t>(s + 32) >> 32;",
            (), ("s+16", str(SHARED_WINDOW >> 32)),
        ),
    ]  # fmt: skip
    # ldmatrix: "ldmatrix.sync.aligned.shape.num{.trans}{.ss}.type r, [p]"
    for count, trans in ((4, ""), (2, ""), (2, ".trans"), (4, ".trans")):
        name = f"ldmatrix_x{count}{trans.replace('.', '_')}"
        results = [f"r{i}" for i in range(count)]
        found.append(
            Probe(
                (f"{name}(u32(&)[{count}], const void*)",), "",
                f"u32 r[{count}]; {name}(r, s + 48); for (int i = 0; i < {count}; ++i) out[i] = r[i];",
                (f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{','.join(results)}}}, [s+48]",), tuple(results),
            )
        )  # fmt: skip
    return tuple(found)


def _wgmma() -> tuple[Probe, ...]:
    # wgmma.mma_async: "wgmma.mma_async.sync.aligned.shape.f32.bf16.bf16 d, a-desc, b-desc, scale-d, imm-scale-a, imm-scale-b,
    # imm-trans-a, imm-trans-b", and "d, a, b-desc, scale-d, imm-scale-a, imm-scale-b, imm-trans-b". N columns are N / 2 floats a thread.
    found = []
    for floats in (8, 12, 16, 20, 24, 28, 32, 64, 128):
        given, results = (",".join(f"{name}{i}" for i in range(floats)) for name in ("f", "r"))
        given = given.replace("f", "p[").replace(",", "],") + "]"
        shape = f"wgmma.mma_async.sync.aligned.m64n{2 * floats}k16.f32.bf16.bf16 {{{given}}}, "
        load = f"float d[{floats}]; for (int i = 0; i < {floats}; ++i) d[i] = p[i];"
        store = f"for (int i = 0; i < {floats}; ++i) out[i] = __float_as_uint(d[i]);"
        for by_columns, truth in ((0, "yes"), (1, "no")):
            scale = int(truth == "yes")
            found.append(
                Probe(
                    (f"wgmma(float(&)[{floats}], u64, u64, bool)",), "const float* p, u64 a, u64 b, bool " + truth,
                    f"{load} wgmma<{by_columns}>(d, a, b, {truth}); {store}",
                    (f"{shape}a, b, {scale}, 1, 1, 0, {by_columns}",), tuple(results.split(",")),
                )
            )  # fmt: skip
            found.append(
                Probe(
                    (f"wgmma(float(&)[{floats}], const u32(&)[4], u64, bool)",),
                    f"const float* p, u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool {truth}",
                    f"{load} const u32 a[4] = {{a0, a1, a2, a3}}; wgmma<{by_columns}>(d, a, b, {truth}); {store}",
                    (f"{shape}{{a0,a1,a2,a3}}, b, {scale}, 1, 1, {by_columns}",), tuple(results.split(",")),
                )
            )  # fmt: skip
    # wgmma.fence, wgmma.commit_group, wgmma.wait_group N; "Async proxy": fence.proxy.async
    # What keeps registers in place makes a sum of constants stay a sum, and loads that nothing else uses stay.
    sum_of = "float d[2] = {0.5f, 0.25f}; CALL; out[0] = __float_as_uint(d[0] + d[1]);"
    step = "{p[0], p[1], p[2], p[3]}"
    wait = "wgmma_wait_group(float(&)[FLOATS], const Operands&...)"
    for call, covers, expected in (
        ("warpgroup_fence_operand(d)", "warpgroup_fence_operand(float(&)[FLOATS])", ()),
        ("wgmma_fence(d)", "wgmma_fence(float(&)[FLOATS])", ("wgmma.fence.sync.aligned",)),
        ("wgmma_wait_group<0>(d)", wait, ("wgmma.wait_group.sync.aligned 0",)),
        ("wgmma_wait_group<1>(d)", wait, ("wgmma.wait_group.sync.aligned 1",)),
    ):
        body = sum_of.replace("CALL", call)
        found.append(Probe((covers,), "", body, expected, ("0x3f400000",), kept=("add.rn.f32",)))
    for body, covers, expected, loads in (
        (f"const u32 a[4] = {step}; keep_until_here(a);", "keep_until_here(const u32(&)[4])", (), 4),
        (f"const u32 a[2][4] = {{{step}, {step.replace('p[', 'p[4 + ')}}}; keep_until_here(a);",
         "keep_until_here(const u32(&)[STEPS][4])", (), 8),
        (f"float d[1] = {{}}; const u32 a[4] = {step}; wgmma_wait_group<0>(d, (u64)7, a);", wait, ("wgmma.wait_group.sync.aligned 0",), 4),
        ("keep_until_here((u64)7);", "keep_until_here(u64)", (), 0),
        ("wgmma_commit_group();", "wgmma_commit_group()", ("wgmma.commit_group.sync.aligned",), 0),
        ("fence_proxy_async();", "fence_proxy_async()", ("fence.proxy.async.shared::cta",), 0),
    ):  # fmt: skip
        found.append(Probe((covers,), "const u32* p", body, expected, kept=("ld.global.u32",) * loads))
    return tuple(found)


def _barriers() -> tuple[Probe, ...]:
    barrier = "reinterpret_cast<u64*>(s + 64)"
    wait = "mbarrier.try_wait.parity.shared::cta.b64"
    return (
        # mbarrier.init: "mbarrier.init{.shared{::cta}}.b64 [addr], count"
        Probe(("mbarrier_init(u64*, int)",), "int n", f"mbarrier_init({barrier}, n);", ("mbarrier.init.shared::cta.b64 [s+64], n",)),
        # mbarrier.arrive: "mbarrier.arrive{.sem.scope}{.shared{::cta}}.b64 state, [addr]{, count}"; the sink symbol takes the state
        Probe(("mbarrier_arrive(u64*)",), "", f"mbarrier_arrive({barrier});", ("mbarrier.arrive.shared::cta.b64 _, [s+64]",)),
        # mbarrier.try_wait: "mbarrier.try_wait.parity{.shared{::cta}}.b64 waitComplete, [addr], phaseParity"; again while it says false
        Probe(
            ("mbarrier_wait_parity(u64*, int)",), "int parity", f"mbarrier_wait_parity({barrier}, parity);",
            tuple(f"{wait} {answer}, [s+64], parity" for answer in (0, 0, 1)), answers=(0, 0, 1),
        ),
        # mbarrier.arrive: "mbarrier.arrive.expect_tx{.sem.scope}{.shared{::cta}}.b64 state, [addr], tx_count"
        Probe(
            ("mbarrier_arrive_expect_tx(u64*, int)",), "int n", f"mbarrier_arrive_expect_tx({barrier}, n);",
            ("mbarrier.arrive.expect_tx.shared::cta.b64 _, [s+64], n",),
        ),
        # barrier: "barrier{.cta}.sync{.aligned} a{, b}": b threads
        Probe(("barrier_sync(int, int)",), "int id, int n", "barrier_sync(id, n);", ("barrier.sync.aligned id, n",)),
        # setmaxnreg: "setmaxnreg.action.sync.aligned.u32 imm-reg-count"
        Probe(("setmaxnreg_dec()",), "", "setmaxnreg_dec<24>();", ("setmaxnreg.dec.sync.aligned.u32 24",)),
        Probe(("setmaxnreg_inc()",), "", "setmaxnreg_inc<240>();", ("setmaxnreg.inc.sync.aligned.u32 240",)),
    )  # fmt: skip


def _copies() -> tuple[Probe, ...]:
    bulk = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    return (
        # cp.async: "cp.async.cg.shared.global{.level::cache_hint} [dst], [src], 16{, src-size}{, cache-policy}"; zeros behind src-size
        Probe(
            ("cp_async_16(void*, const void*, bool)",), "const u32* src, bool yes, bool no",
            "cp_async_16(s + 16, src + 4, yes); cp_async_16(s + 32, src + 8, no);",
            ("cp.async.cg.shared.global [s+16], [src+16], 16, 16", "cp.async.cg.shared.global [s+32], [src+32], 16, 0"),
        ),
        Probe(
            ("cp_async_16(void*, const void*, u64)",), "const u32* src, u64 policy", "cp_async_16(s + 16, src + 4, policy);",
            ("cp.async.cg.shared.global.L2::cache_hint [s+16], [src+16], 16, policy",),
        ),
        Probe(
            ("evict_first_policy()",), "const u32* src", "cp_async_16(s + 16, src + 4, evict_first_policy());",
            (f"cp.async.cg.shared.global.L2::cache_hint [s+16], [src+16], 16, {_EVICT_FIRST}",),
        ),
        # cp.async.commit_group, cp.async.wait_group N
        Probe(("cp_async_commit_group()",), "", "cp_async_commit_group();", ("cp.async.commit_group",)),
        Probe(
            ("cp_async_wait_group()",), "", "cp_async_wait_group<3>(); cp_async_wait_group<0>();",
            ("cp.async.wait_group 3", "cp.async.wait_group 0"),
        ),
        # cp.async.bulk: "cp.async.bulk.dst.src.completion_mechanism [dstMem], [srcMem], size, [mbar]"
        Probe(
            ("cp_async_bulk(void*, const void*, int, u64*)",), "const u32* src, int n",
            "cp_async_bulk(s + 16, src + 4, n, reinterpret_cast<u64*>(s + 64));", (f"{bulk} [s+16], [src+16], n, [s+64]",),
        ),
    )  # fmt: skip


def without_policy() -> tuple[Probe, ...]:
    """Where NO_CACHE_POLICY is defined."""
    return (
        Probe(
            ("cp_async_16(void*, const void*, u64)",), "const u32* src, u64 policy", "cp_async_16(s + 16, src + 4, policy);",
            ("cp.async.cg.shared.global [s+16], [src+16], 16, 16",),
        ),
    )  # fmt: skip


def _loads() -> tuple[Probe, ...]:
    # ld: "ld{.weak}{.ss}{.level1::eviction_priority}{.level::cache_hint}{.vec}.type d, [a]{, cache-policy}", "ld.relaxed.scope{.ss}…";
    # ld.global.nc: "ld.global{.cop}.nc{.level1::eviction_priority}…{.vec}.type d, [a]{, cache-policy}"
    found = []
    four, two = "out[0] = v.x; out[1] = v.y; out[2] = v.z; out[3] = v.w;", "out[0] = v.x; out[1] = v.y;"
    for name, kind, instruction, policy in (
        ("ld_global_nc_16", "uint4", "ld.global.nc.L1::no_allocate.v4.u32", ""),
        ("ld_global_nc_8", "uint2", "ld.global.nc.L1::no_allocate.v2.u32", ""),
        ("ld_global_16", "uint4", "ld.global.L1::no_allocate.L2::cache_hint.v4.u32", f", {_EVICT_FIRST}"),
        ("ld_global_8", "uint2", "ld.global.L1::no_allocate.L2::cache_hint.v2.u32", f", {_EVICT_FIRST}"),
        ("ld_global_4", "u32", "ld.global.L1::no_allocate.u32", ""),
        ("ld_relaxed_16", "uint4", "ld.relaxed.gpu.global.v4.u32", ""),
        ("ld_relaxed_4", "u32", "ld.relaxed.gpu.global.u32", ""),
    ):
        count = {"uint4": 4, "uint2": 2, "u32": 1}[kind]
        words = [f"p[{4 + i}]" for i in range(count)]
        values = f"{{{','.join(words)}}}" if count > 1 else words[0]
        store = {4: four, 2: two, 1: "out[0] = v;"}[count]
        covers, body = (f"{name}(const void*)",), f"const {kind} v = {name}(p + 4); {store}"
        found.append(Probe(covers, "const u32* p", body, (f"{instruction} {values}, [p+16]{policy}",), tuple(words)))
    for kind, count, before, store in (("uint4", 4, "{7, 8, 9, 10}", four), ("uint2", 2, "{7, 8}", two)):
        for truth in ("yes", "no"):
            words = [f"p[{4 + i}]" for i in range(count)]
            loaded = (f"ld.global.v{count}.u32 {{{','.join(words)}}}, [p+16]",) if truth == "yes" else ()
            kept = tuple(str(7 + i) for i in range(count))
            found.append(
                Probe(
                    (f"ld_global_if(bool, {kind}&, const void*)",), f"const u32* p, bool {truth}",
                    f"{kind} v = {before}; ld_global_if({truth}, v, p + 4); {store}", loaded, tuple(words) if truth == "yes" else kept,
                )
            )  # fmt: skip
    return tuple(found)


def _launches() -> tuple[Probe, ...]:
    # griddepcontrol: "griddepcontrol.action", .launch_dependents or .wait
    allow, wait = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
    return (
        Probe(("griddepcontrol_launch_dependents()",), "", "griddepcontrol_launch_dependents();", (allow,)),
        Probe(("griddepcontrol_wait()",), "", "griddepcontrol_wait();", (wait,)),
        Probe(("begin_after_previous_kernel()",), "", "begin_after_previous_kernel();", (allow, wait)),
    )


def clusters() -> tuple[Probe, ...]:
    """For a GPU with clusters: a block among three, and one alone."""
    # mapa: "mapa.shared::cluster.u32 d, a, b"; st.async: "st.async.shared::cluster.mbarrier::complete_tx::bytes.type [a], b, [mbar]"
    store = "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32"

    def sent(rank: int, prefix: str = "") -> tuple[str, str, str]:
        to, barrier = (f"mapa.shared::cluster.u32 {place}@{rank}, {place}, {rank}" for place in ("s+16", "s+64"))
        return f"{prefix}{to}", f"{prefix}{barrier}", f"{prefix}{store} [s+16@{rank}], v, [s+64@{rank}]"

    by_lane = [sent(lane, f"t{lane}: ") for lane in range(3)]
    to_all = tuple(lines[step] for step in range(3) for lines in by_lane)
    arrived, word = "reinterpret_cast<u64*>(s + 64)", "reinterpret_cast<u32*>(s + 16)"
    read = "__syncthreads(); out[0] = *reinterpret_cast<volatile u32*>(s + 16);"
    # mbarrier.try_wait with .sem.scope = .acquire.cluster: what other blocks sent is seen behind it
    wait = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64"
    begin = (
        "t0: mbarrier.init.shared::cta.b64 [s+64], 1",
        "t0: mbarrier.arrive.expect_tx.shared::cta.b64 _, [s+64], n",
        "t0: fence.mbarrier_init.release.cluster",  # membar/fence: "fence.mbarrier_init.release.cluster"
        "bar.warp.sync -1",
        "barrier.cluster.arrive.relaxed.aligned",  # barrier.cluster: "barrier.cluster.arrive{.sem}{.aligned}"
        "barrier.cluster.wait.acquire.aligned",
    )
    sends = (
        ("send_to_cluster(u32*, u32, u64*)", "u32 v", word),
        ("send_to_cluster(float*, float, u64*)", "float v", "reinterpret_cast<float*>(s + 16)"),
        ("send_to_cluster(int*, int, u64*)", "int v", "reinterpret_cast<int*>(s + 16)"),
    )
    found = []
    for covers, parameter, to in sends:
        body = f"send_to_cluster({to}, v, {arrived});"
        found.append(Probe((covers,), parameter, body, to_all, threads=5, blocks=3))
        found.append(Probe((covers,), parameter, f"{body} {read}", ("bar.sync 0",), ("v",), threads=5))
    each = f"send_each_to_cluster({word}, v, {arrived});"
    covers = "send_each_to_cluster(u32*, u32, u64*)"
    return (
        *found,
        Probe((covers,), "u32 v", each, (*sent(0), *sent(1), *sent(2)), blocks=3),
        Probe((covers,), "u32 v", f"{each} {read}", ("bar.sync 0",), ("v",)),
        Probe(("cluster_begin(u64*, int)",), "int n", f"cluster_begin({arrived}, n);", begin, threads=2, blocks=3),
        Probe(("cluster_begin(u64*, int)",), "int n", f"cluster_begin({arrived}, n);", (), threads=2),
        Probe(
            ("wait_for_cluster(u64*)",), "", f"wait_for_cluster({arrived});",
            tuple(f"{wait} {answer}, [s+64], 0" for answer in (0, 1)), blocks=3, answers=(0, 1),
        ),
        Probe(("wait_for_cluster(u64*)",), "", f"wait_for_cluster({arrived});", ("bar.sync 0",)),
        # special registers %clusterid, %cluster_ctarank, %cluster_nctarank; a thread's number counts the blocks before its own
        Probe(
            ("cluster_id()", "cluster_thread_rank()", "cluster_num_blocks()"), "",
            "if (threadIdx.x == 3) { out[0] = cluster_id(); out[1] = cluster_thread_rank(); out[2] = cluster_num_blocks(); }",
            (), (str(0x5C105), "13", "3"), threads=5, blocks=3, rank=2,
        ),
    )  # fmt: skip


def without_clusters() -> tuple[Probe, ...]:
    """For GPUs older than sm_90: a cluster is one block, launches do not overlap."""
    arrived, word = "reinterpret_cast<u64*>(s + 64)", "reinterpret_cast<u32*>(s + 16)"
    read = "__syncthreads(); out[0] = *reinterpret_cast<volatile u32*>(s + 16);"
    return (
        Probe(("begin_after_previous_kernel()",), "", "begin_after_previous_kernel();", ()),
        Probe(("cluster_begin(u64*, int)",), "int n", f"cluster_begin({arrived}, n);", ()),
        Probe(("wait_for_cluster(u64*)",), "", f"wait_for_cluster({arrived});", ("bar.sync 0",)),
        *(
            Probe((f"{name}(u32*, u32, u64*)",), "u32 v", f"{name}({word}, v, {arrived}); {read}", ("bar.sync 0",), ("v",))
            for name in ("send_to_cluster", "send_each_to_cluster")
        ),
        Probe(
            ("cluster_id()", "cluster_thread_rank()", "cluster_num_blocks()"), "",
            "if (threadIdx.x == 3) { out[0] = cluster_id(); out[1] = cluster_thread_rank(); out[2] = cluster_num_blocks(); }",
            (), ("0", "3", "1"), threads=5, blocks=7, rank=2,
        ),
    )  # fmt: skip


def _ranks() -> tuple[Probe, ...]:
    # ld and st: "ld.relaxed.scope{.ss}{.vec}.type", .sys: other GPUs see it; u64 and v2.u64 arrive as whole words
    values = "const float values[2] = {p[0], p[2]};"
    get = "float v[2] = {}; out[0] = words_are_there"
    return (
        Probe(
            ("send_word(u64*, u32, u32)",), "u64* to, u32 word, u32 round", "send_word(to + 1, word, round);",
            ("st.relaxed.sys.global.u64 [to+8], round:word",),
        ),
        Probe(
            ("word_is_there(const u64*, u32, u32&)",), "const u64* p, u32 round",
            "u32 word; out[0] = word_is_there(p + 1, round, word); out[1] = word;",
            ("ld.relaxed.sys.global.u64 p[3]:p[2], [p+8]",), ("0", "p[2]"),
        ),
        Probe(
            ("send_words(u64*, const float*, u32)",), "u64* to, const float* p, u32 round",
            f"{values} send_words<2>(to + 2, values, round);",
            ("st.relaxed.sys.global.v2.u64 [to+16], {round:p[0],round:p[2]}",),
        ),
        Probe(
            ("send_words(u64*, const float*, u32)",), "u64* to, const float* p, u32 round",
            f"{values} send_words<1>(to + 1, values + 1, round);",
            ("st.relaxed.sys.global.u64 [to+8], round:p[2]",),
        ),
        Probe(
            ("words_are_there(const u64*, u32, float*)",), "const u64* p, u32 round",
            f"{get}<2>(p + 2, round, v); out[1] = __float_as_uint(v[0]); out[2] = __float_as_uint(v[1]);",
            ("ld.relaxed.sys.global.v2.u64 {p[5]:p[4],p[7]:p[6]}, [p+16]",), ("0", "p[4]", "p[6]"),
        ),
        Probe(
            ("words_are_there(const u64*, u32, float*)",), "const u64* p, u32 round",
            f"{get}<1>(p + 1, round, v); out[1] = __float_as_uint(v[0]);",
            ("ld.relaxed.sys.global.u64 p[3]:p[2], [p+8]",), ("0", "p[2]"),
        ),
    )  # fmt: skip
