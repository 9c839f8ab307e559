"""Turn text on disk into the micro-batches of a step.

    tokenizer        text <-> token ids, exact in both directions
    encoder          texts to the bytes of a token file, fast
    source           the documents of a source, and which of them are for validation
    source_format    how a file of a source is read; text_files, json_lines and parquet_files
                     implement one format each
    corpus_manifest  description of a prepared corpus
    prepare          source -> tokenizer, token files and manifest in one folder, once
    corpus_build     the stages of preparation; corpus_parts, part_writer, part_merger and
                     worker_pool do the work
    permutation      pseudo-random order and numbers in closed form
    prepared_corpus  a prepared corpus, the samples that a run reads from it, and where they came
                     from
    blend            which corpus each sample of a run comes from
    corpora          all corpora of a run, with one tokenizer
    spans            span corruption for encoder-decoders
    batch            a micro-batch, and the digest of micro-batches
    loader           the micro-batches of a step on one replica
    run_loader       builds the loader of a run from its configuration

Terms: a *document* is a text followed by an end-of-document token; a *split* is the training or
the validation part of the documents; a *window* is the tokens of one sample, `sequence_length` and
the one after them; a *part* is the portion of a source that one worker tokenises at a time.
"""
