// Copies units of K and V between the daemon's pages and the blocks of an engine, either way, all layers in one launch.
// A unit is rows: its vectors of 16 bytes lie together, and rows are found by k or v, head and slot on either side.
// For hipcc, HIPRTC and NVRTC alike; nothing is included.

// Where things lie on either side, in bytes from one to the next: part is a unit in a page or in a block.
struct Side {
    long long layer, item, part, kv, head, slot;
};

// layers: where each of the engine's layers begins. where: [units, 4], the page, the unit in it, the block, the unit in it.
// sides: of pages and of blocks. Grid units * layers, in any block. Pages are written if `saves`, and blocks otherwise.
extern "C" __global__ void move_units(unsigned char *pages, const long long *layers, const long long *where,
                                      const Side *sides, int layer_count, int kvs, int heads, int slots, int vectors,
                                      int saves) {
    const Side page = sides[0], block = sides[1];
    const long long unit = blockIdx.x / layer_count, layer = blockIdx.x % layer_count;
    const long long *place = where + 4 * unit;
    unsigned char *in_page = pages + place[0] * page.item + place[1] * page.part + layer * page.layer;
    unsigned char *in_block = (unsigned char *)layers[layer] + place[2] * block.item + place[3] * block.part;
    const int total = kvs * heads * slots * vectors, step = blockDim.x;
    for (int first = threadIdx.x; first < total; first += 4 * step) {
        uint4 *targets[4], values[4];
        // All four loads are in flight before the first store.
        for (int nth = 0; nth < 4; nth++) {
            const int at = first + nth * step;
            if (at >= total) break;
            const int row = at / vectors, slot = row % slots, head = row / slots % heads, kv = row / slots / heads;
            const long long inner = (long long)(at % vectors) * 16;
            uint4 *one = (uint4 *)(in_page + kv * page.kv + head * page.head + slot * page.slot + inner);
            uint4 *other = (uint4 *)(in_block + kv * block.kv + head * block.head + slot * block.slot + inner);
            targets[nth] = saves ? one : other;
            values[nth] = saves ? *other : *one;
        }
        for (int nth = 0; nth < 4; nth++)
            if (first + nth * step < total) *targets[nth] = values[nth];
    }
}
