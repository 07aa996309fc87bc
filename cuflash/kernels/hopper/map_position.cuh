// Where a head stands in tensor maps.
#pragma once

constexpr int MAP_AXES = 3;  // leading axes of a tensor map, at most

// A head's position along the leading axes of an operand's tensor map: 0 where the operand
// broadcasts, for such an axis has one position there.
struct MapPosition {
    int at[MAP_AXES];
};
