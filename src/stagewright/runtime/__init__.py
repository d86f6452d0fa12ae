"""Real training over uneven stages: workers that run their orders.

worker       a loop over its order, and a table of what each kind of action does
exchange     rows from and to other stages                  transport    over what they move
replica      one copy of a stage, with all that belongs to it:
  stage        forward and backward of microbatches         deferred     weight gradients of several at once
  weights      its versions and its optimizer, and parameters that other stages use too
  reduce       gradients in buckets, over its replicas      all_reduce   how they are added up
world        the workers as process groups                  background   what threads do beside them
precision    autocast, loss scale, agreement                timing       spans, and numbers that nobody waits for
checkpoint/  saved, found again, restored                   launch/      workers started, here and elsewhere
safety/      watchdog, diagnosis, checks before the launch, the watch on numbers, an orderly stop
"""
