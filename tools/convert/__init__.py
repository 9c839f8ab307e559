"""Parts of tools/convert_checkpoint.py: weights of ours in Hugging Face's form, and back.

transforms   how one tensor of ours becomes theirs, and the other way round
table        the rows of a family: our name, their names, the transform
families     one table a family, and how the two configurations translate
ours         reading and writing weights of ours, a tensor at a time
theirs       the same for a folder of Hugging Face's
check        both models on the same tokens
"""
