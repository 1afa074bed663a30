-- Uploads without a length: a POST of 16 KiB in four chunks. wrk itself only knows bodies with a length.
local text

function init()
    wrk.headers["Content-Type"] = "application/octet-stream"
    wrk.headers["Transfer-Encoding"] = "chunked"
    local chunk = string.format("%x\r\n%s\r\n", 4096, string.rep("x", 4096))
    text = wrk.format("POST") .. string.rep(chunk, 4) .. "0\r\n\r\n"
end

function request()
    return text
end
