/* Makes the launches of a recorded call once more, with other addresses; see tape.py.

   The driver's functions come from the caller, so nothing of CUDA is needed to compile this. */

#include <stddef.h>
#include <stdint.h>

/* CUlaunchAttribute and CUlaunchConfig */
struct attribute {
    int id;
    int unused;
    union {
        char all[64];
        int allowed;
        uint64_t aligned; /* as CUDA's, which has pointers */
    } value;
};
struct config {
    unsigned grid[3], block[3], shared;
    void *stream;
    const struct attribute *attributes;
    unsigned count;
};
enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

typedef int launch_kernel(const struct config *config, void *function, void **parameters, void **extra);
typedef int set_bytes(uint64_t address, unsigned char value, size_t count, void *stream);
typedef int replace_address(void *tensor_map, void *address);

/* An address: a number of bytes after the beginning of a tensor of the call, or of the memory it allocates. */
struct place {
    int64_t base;
    uint64_t offset;
};

/* A descriptor of TMA, and the address that it has. */
struct map {
    struct place place;
    uint64_t address;
    void *tensor_map;
};

/* A kernel; or, without a function, bytes that are set to 0, from the pointer of that number on. */
struct launch {
    void *function;
    void **parameters;
    uint64_t pointer;
    uint64_t bytes;
    uint32_t grid[3];
    uint32_t threads;
    uint32_t shared;
    uint32_t linked; /* whether it may begin before the launch before it has ended: the kernel waits for that itself */
};

struct tape {
    launch_kernel *launch_kernel;
    set_bytes *set_bytes;
    replace_address *replace_address;
    uint64_t *pointers; /* the parameters of all launches that are pointers */
    const struct place *places;
    struct map *maps;
    const struct launch *launches;
    int64_t pointer_count;
    int64_t map_count;
    int64_t launch_count;
};

/* Return 0, or the driver's first error, after which nothing more is launched. */
int lineate_replay(const struct tape *tape, const uint64_t *bases, void *stream) {
    const struct attribute early = {PROGRAMMATIC_STREAM_SERIALIZATION, 0, {.allowed = 1}};
    for (int64_t i = 0; i < tape->pointer_count; i++)
        tape->pointers[i] = bases[tape->places[i].base] + tape->places[i].offset;
    for (int64_t i = 0; i < tape->map_count; i++) {
        struct map *map = tape->maps + i;
        uint64_t address = bases[map->place.base] + map->place.offset;
        if (address == map->address)
            continue;
        int error = tape->replace_address(map->tensor_map, (void *)(uintptr_t)address);
        if (error)
            return error;
        map->address = address;
    }
    for (int64_t i = 0; i < tape->launch_count; i++) {
        const struct launch *launch = tape->launches + i;
        const uint32_t *grid = launch->grid;
        const struct config config = {
            {grid[0], grid[1], grid[2]}, {launch->threads, 1, 1}, launch->shared, stream, &early, launch->linked != 0};
        int error = launch->function
            ? tape->launch_kernel(&config, launch->function, launch->parameters, NULL)
            : tape->set_bytes(tape->pointers[launch->pointer], 0, launch->bytes, stream);
        if (error)
            return error;
    }
    return 0;
}
