"""Images and labels, from files to tensors.

source      what a dataset is, the places of records in files, faults that are skipped
ofrecord    ┐
tar         ├ datasets by index: OFRecord parts, WebDataset shards, class folders
folder      ┘
synthetic   rows that any worker makes alike
opening     a path or the word `synthetic` → the dataset that is there
order       the order of an epoch, from (seed, epoch)
draws       random numbers by position, not by who asks
jpeg        bytes → the pixels of one crop, decoded as little as the crop allows
augment     which crop; mean and standard deviation
loader      batches, prefetched
writing     images and labels → files
needs       what has to be installed for that
generate, convert, inspection    behind `stagewright data make, convert, inspect`
"""
