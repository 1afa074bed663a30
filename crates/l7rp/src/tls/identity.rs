//! Who a client's certificate says that it is, in one way of writing that leaves no doubt.

use std::fmt::Write;

use rustls::pki_types::CertificateDer;
use x509_parser::asn1_rs::Oid;
use x509_parser::extensions::GeneralName;
use x509_parser::oid_registry as oid;
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::x509::{AttributeTypeAndValue, X509Name};

/// The subject (RFC 4514); where that is empty, the first alternative name, with its kind in
/// front. Visible ASCII and spaces: the rest is percent-encoded (RFC 3986, section 2.1), and so is
/// a percent sign.
pub(super) fn of(der: &CertificateDer<'_>) -> Option<String> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let subject = subject(certificate.subject());
    let name = if subject.is_empty() { alternative(&certificate)? } else { subject };
    Some(visible(&name))
}

fn subject(name: &X509Name<'_>) -> String {
    // The most specific comes first in this way of writing.
    let all: Vec<_> = name.iter_rdn().collect();
    let all = all.iter().rev().map(|rdn| {
        let values: Vec<_> = rdn.iter().map(attribute).collect();
        values.join("+")
    });
    all.collect::<Vec<_>>().join(",")
}

fn attribute(of: &AttributeTypeAndValue<'_>) -> String {
    match (short(of.attr_type()), of.as_str()) {
        (Some(kind), Ok(value)) => format!("{kind}={}", escaped(value)),
        (kind, _) => {
            let mut out = kind.map_or_else(|| of.attr_type().to_id_string(), str::to_owned);
            out += "=#";
            for octet in of.as_slice() {
                let _ = write!(out, "{octet:02x}");
            }
            out
        }
    }
}

/// Those of RFC 4514, section 3, and the one that everybody knows.
fn short(kind: &Oid<'_>) -> Option<&'static str> {
    let all = [
        (oid::OID_X509_COMMON_NAME, "CN"),
        (oid::OID_X509_LOCALITY_NAME, "L"),
        (oid::OID_X509_STATE_OR_PROVINCE_NAME, "ST"),
        (oid::OID_X509_ORGANIZATION_NAME, "O"),
        (oid::OID_X509_ORGANIZATIONAL_UNIT, "OU"),
        (oid::OID_X509_COUNTRY_NAME, "C"),
        (oid::OID_X509_STREET_ADDRESS, "STREET"),
        (oid::OID_DOMAIN_COMPONENT, "DC"),
        (oid::OID_USERID, "UID"),
        (oid::OID_PKCS9_EMAIL_ADDRESS, "emailAddress"),
    ];
    all.into_iter().find(|(known, _)| known == kind).map(|(_, name)| name)
}

/// RFC 4514, section 2.4: nothing in a value may be taken for the beginning of another.
fn escaped(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    let last = value.chars().count().saturating_sub(1);
    for (at, c) in value.chars().enumerate() {
        let edge = at == 0 && matches!(c, ' ' | '#') || at == last && c == ' ';
        if edge || matches!(c, '"' | '+' | ',' | ';' | '<' | '>' | '\\') {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

fn alternative(certificate: &X509Certificate<'_>) -> Option<String> {
    let extension = certificate.subject_alternative_name().ok()??;
    extension.value.general_names.iter().find_map(|name| match name {
        GeneralName::DNSName(name) => Some(format!("DNS:{name}")),
        GeneralName::URI(uri) => Some(format!("URI:{uri}")),
        GeneralName::RFC822Name(name) => Some(format!("email:{name}")),
        GeneralName::IPAddress(octets) => Some(format!("IP:{}", super::files::address(octets)?)),
        _ => None,
    })
}

fn visible(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for octet in name.bytes() {
        match octet {
            b'%' | ..b' ' | 0x7f.. => {
                let _ = write!(out, "%{octet:02X}");
            }
            _ => out.push(char::from(octet)),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use rcgen::string::Ia5String;
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};

    use super::*;

    fn identity(parts: &[(DnType, &str)], alternatives: Vec<SanType>) -> Option<String> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        for (kind, value) in parts {
            params.distinguished_name.push(kind.clone(), *value);
        }
        params.subject_alt_names = alternatives;
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        of(certificate.der())
    }

    #[test]
    fn a_subject_is_written_so_that_nobody_can_seem_to_be_another() {
        let cases: [(&[(DnType, &str)], &str); 6] = [
            (&[(DnType::CommonName, "alice")], "CN=alice"),
            (
                &[(DnType::OrganizationName, "Acme, Inc"), (DnType::CommonName, "alice")],
                "CN=alice,O=Acme\\, Inc",
            ),
            (&[(DnType::CommonName, "eve,O=Acme")], "CN=eve\\,O=Acme"),
            (&[(DnType::CommonName, " #x+ ")], "CN=\\ #x\\+\\ "),
            (&[(DnType::CommonName, "ä%\r\n")], "CN=%C3%A4%25%0D%0A"),
            (&[(DnType::CustomDnType(vec![1, 2, 3, 4]), "x")], "1.2.3.4=#78"),
        ];
        for (parts, expected) in cases {
            assert_eq!(identity(parts, vec![]).as_deref(), Some(expected));
        }
    }

    #[test]
    fn without_a_subject_an_alternative_name_says_its_kind() {
        let text = |text: &str| Ia5String::try_from(text).unwrap();
        for (name, expected) in [
            (SanType::DnsName(text("a.test")), "DNS:a.test"),
            (SanType::URI(text("spiffe://td/ns/a")), "URI:spiffe://td/ns/a"),
            (SanType::IpAddress([192, 0, 2, 1].into()), "IP:192.0.2.1"),
        ] {
            assert_eq!(identity(&[], vec![name]).as_deref(), Some(expected));
        }
        assert_eq!(identity(&[], vec![]), None);
    }
}
