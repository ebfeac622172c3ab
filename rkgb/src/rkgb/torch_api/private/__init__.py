"""The private names of torch that this package needs, each once, with its purpose.

Gets nothing; gives functions under names of ours. No other folder imports private modules of torch.
Read autograd.py first (the engine), then modes.py, flags.py, tables.py, memory.py and inductor.py.
"""
