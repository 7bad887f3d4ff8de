"""The step that the benchmarks are tried on."""

STEP = """
group('dp', size=8)

def graph(x: bf16[4096, 4096], p: bf16[512, 4096], q: bf16[512, 4096]):
    gp: bf16[4096, 4096] = all_gather(p, 8, 'dp')
    wp: bf16[4096, 4096] = wait(gp)
    a: bf16[4096, 4096] = mm(x, wp)
    gq: bf16[4096, 4096] = all_gather(q, 8, 'dp')
    wq: bf16[4096, 4096] = wait(gq)
    b: bf16[4096, 4096] = mm(a, wq)
    return [b]
"""
