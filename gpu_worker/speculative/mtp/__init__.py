"""MTP, NextN: the head that a checkpoint holds beside its model, which predicts further tokens."""
