"""Whether this process has CUDA's driver in its memory. Imports nothing, so that a process with torch alone can ask."""


def libcuda_mapped() -> bool:
    """True once something has loaded libcuda.so; False also where the system does not show what is mapped."""
    try:
        with open("/proc/self/maps") as maps:
            return "libcuda.so" in maps.read()
    except OSError:
        return False
