"""`python -m shoal`, which torchrun, srun and mpirun can start."""

from shoal.cli import main

if __name__ == "__main__":
    main()
