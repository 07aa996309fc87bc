import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported: tests run side by side
