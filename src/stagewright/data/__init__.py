"""Images and labels, and text as tokens: from files to tensors.

source      what a dataset is, the one that a directory holds, faults that are skipped
records     class folders, OFRecord parts and WebDataset shards, read and written; behind `stagewright data convert`
order       the order of an epoch, and random numbers by position, not by who asks
pixels      which crop is seen, and its pixels, decoded as little as the crop allows
generate, inspection    behind `stagewright data make, inspect`
text        documents and their tokens
tokens      a folder of tokens
packing     tokens as rows of a batch
"""
