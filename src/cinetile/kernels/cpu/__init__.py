"""The native kernel for CPUs: C++ behind XLA's foreign function interface.

The C++ sources are in the folder `native` of the repository.
"""

from cinetile.kernels.cpu.implementation import CpuImplementation as CpuImplementation
