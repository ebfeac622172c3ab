"""The models that users.py trains: built from configurations, called as their packages' users do.

Gets nothing; gives `MODELS`, rows of package, name and builder. A builder returns the module in
train mode and a function from the number of a step to that step's arguments. Beside torch, each
package is imported only by its own builders. Tried with pip install --no-deps, beside one torch.
Read table.py, then batches.py, hugging_face.py, vision.py and others.py.
"""
