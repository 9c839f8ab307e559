"""Turn text on disk into the micro-batches of a training step.

    tokenizer        the interface of tokenizers, which convert text to token ids and back, and the
                     encoder of token files; sentencepiece_tokenizer and json_tokenizer implement
                     one kind each
    tokenizer_source finds, opens and copies a tokenizer
    source           lists and reads the documents of a source, and assigns each to training or
                     validation; source_choice chooses the files by the formats that file_formats
                     finds
    source_format    interface of the file formats; file_readers implements it
    corpus_manifest  describes a prepared corpus, and what was read and left out; finds bytes that
                     have changed
    prepare          writes the tokenizer, token files and manifest of a source to one folder, once
    corpus_build     the stages of preparation; corpus_parts and worker_pool implement them
    permutation      pseudo-random permutations and numbers that are computed, not stored
    prepared_corpus  reads samples from a prepared corpus, and finds the files they come from
    packing          packs whole documents into samples, and reads these
    document_rows    samples with the borders of their documents, and micro-batches of them
    blend            chooses the corpus of each sample if a run mixes several corpora
    corpora          all corpora of a run, with one tokenizer
    denoising        divides texts between the encoder and the decoder of an encoder-decoder
    batch            a micro-batch, and the digest of micro-batches
    loader           reads the micro-batches of a step on one replica
    run_loader       builds the loader of a run from its configuration

Terms:

- A *source* is the text file or folder that a corpus is prepared from.
- A *document* is one text of the source. In the token files an end-of-document token follows it.
- A *split* is the set of documents for training or the set for validation.
- A *sample* is one row of a batch, and a *window* is the range of tokens that a sample reads.
- A *part* is the portion of a source that one worker process tokenises at a time.
"""
