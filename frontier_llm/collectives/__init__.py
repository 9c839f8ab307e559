"""What is sent between ranks by us (megatron's layers and schedules send for themselves).

Every call takes its group as an argument, returns at once with a handle, and counts its bytes.
"""
