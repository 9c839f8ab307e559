"""What the model reads: from text on a disk to the micro-batches of a step.

    tokenizer    text <-> token ids, exactly both ways
    encoder      texts to the bytes of a token file, fast
    formats      what a file of a source is; text_files, json_lines, parquet_files read one each
    corpus       the documents of a source, and which of them are for validation
    manifest     what a prepared corpus holds
    prepare      source -> tokenizer, token files and manifest in one folder, once
    build        the stages of that; parts, part_writer, workers, duplicates and merge do the work
    permutation  a shuffled order in closed form
    datasets     a prepared corpus, opened; sample i of a run
    blend        which corpus sample i of a run comes from
    corpora      all that a run reads, with one tokenizer
    origins      from a token back to its document and file
    spans        span corruption for encoder-decoders
    batch        one micro-batch
    loader       the micro-batches of a step on one replica
    reading      how a run puts these together

Words: a *document* is a text with an end-of-document token after it; a *split* is the training or
the validation part of the documents; a *window* is what one sample reads, `sequence_length`
tokens and the one after them; a *part* is the stretch of a source that one worker tokenises at a
time.
"""
