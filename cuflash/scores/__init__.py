"""What becomes of a score between the product q.k and the softmax."""
