"""Images and labels, from files to tensors.

source      what a dataset is, the places of records in files, faults that are skipped
ofrecord    ┐
tar         ├ datasets by index: OFRecord parts, WebDataset shards, class folders
folder      ┘
opening     a path → the dataset that is there
order       the order of an epoch, and random numbers by position, not by who asks
augment     which crop; mean and standard deviation
pixels      bytes → the pixels of one crop, decoded as little as the crop allows
loader      batches, prefetched
writing     images and labels → files; behind `stagewright data convert`
generate, inspection    behind `stagewright data make, inspect`
"""
