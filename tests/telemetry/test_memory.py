from frontier_llm.telemetry.memory import resident_bytes


def test_what_is_allocated_is_resident():
    before = resident_bytes()
    held = bytearray(b"x") * (64 * 1024**2)
    assert resident_bytes() - before > 0.9 * len(held)
