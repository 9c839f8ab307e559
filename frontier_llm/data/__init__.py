"""What the model reads: from text on a disk to the micro-batches of a step.

    tokenizer    text <-> token ids, exactly both ways
    corpus       the documents of a source, and which of them are for validation
    manifest     what a prepared corpus holds
    prepare      source -> tokenizer, token files and manifest in one folder
    permutation  a shuffled order in closed form
    datasets     a prepared corpus, opened; sample i of a run
    batch        one micro-batch
    loader       the micro-batches of a step on one replica

Words: a *document* is a text with an end-of-document token after it; a *split* is the training or
the validation part of the documents; a *window* is what one sample reads, `sequence_length`
tokens and the one after them.
"""
