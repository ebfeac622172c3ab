"""Networks, data and problems that tests train and plan; each file needs one package.

Gets a size or a seed. `examples` (rkgb) are small modules, each with a trap for whoever records it;
`nets` and `operators` are small networks that are hard to run exactly, `texts` a dataset for
trainers; `problems` (rockmate) are problems made by hand.
"""
