"""Networks, data and problems that tests train and plan; each file needs one package.

Gets a size or a seed. rkgb: `examples`, small modules, each with a trap for whoever records it.
rockmate: `nets` and `operators`, small networks that are hard to run exactly; `texts`, a dataset
for trainers; `problems` made by hand. rotor: `chains` and sequential networks.
"""
